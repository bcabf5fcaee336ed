"""The command line: check, fixes, diff, doctor.

    $ loadlens check recipe:glm-dsa-fp8 --delivery file --model-class nvidia
    FAIL  recipe:glm-dsa-fp8 · file · vLLM 0.32.0 · nvidia · cpu
    …

Exit status: 0 no law is broken, 1 a law is broken, 2 it could not run (one sentence on stderr says why).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from . import delivery as deliveries
from .errors import CannotRun

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise CannotRun(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loadlens", description="See what happened while vLLM loaded your weights.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    check = commands.add_parser("check", help="deliver a checkpoint and judge the five laws",
                                epilog="exit status: 0 no law is broken, 1 a law is broken, 2 it could not run")
    check.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder with config.json and safetensors, or recipe:NAME")
    check.add_argument("--delivery", default="sorted", metavar="D", help=f"{deliveries.GRAMMAR} (default: sorted)")
    _variant(check)
    check.add_argument("--model-class", metavar="C", help="generic, nvidia, amd or module:Class (default: what vLLM resolves here)")
    check.add_argument("--quantization", metavar="Q", help="vLLM's online quantization, as in `vllm serve --quantization`")
    check.add_argument("--kernel", choices=("marlin",), help="the kernel to load for; marlin's CUDA-only operations are stand-ins elsewhere")
    check.add_argument("--device", default="cpu", choices=("cpu", "meta", "cuda"), help="where the model is built (default: cpu)")
    check.add_argument("--rounds", type=int, default=1, metavar="N", help="deliver N times, the later ones as weight updates (default: 1)")
    check.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds for one load (default: 300)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead")
    check.set_defaults(run=_check)

    fixes = commands.add_parser("fixes", help="list every known fix: present, absent or not applicable, with its line")
    _variant(fixes)
    fixes.set_defaults(run=_fixes)

    diff = commands.add_parser("diff", help="show a fix as a diff, applied or taken back")
    diff.add_argument("fix", metavar="FIX", help="a name from `loadlens fixes`, such as pr46168")
    _variant(diff)
    diff.add_argument("--revert", action="store_true", help="take the fix back instead of applying it")
    diff.set_defaults(run=_diff)

    doctor = commands.add_parser("doctor", help="say whether this machine can run loadlens, and what is missing")
    doctor.set_defaults(run=_doctor)
    return parser


def _variant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", metavar="V", help="a vLLM: 0.32.0, 0.24.0, 0.32.0+pr46168 (applied), 0.32.0-pr46168 (taken back); "
                                                       "default: the installed release")


def _check(args: argparse.Namespace) -> int:
    from .run import run

    if args.rounds < 1 or not 0 < args.timeout < 1e7:
        raise CannotRun("--rounds and --timeout take finite numbers above zero")
    result = run(args.checkpoint, delivery=args.delivery, variant=args.variant, model_class=args.model_class,
                 quantization=args.quantization, kernel=args.kernel, device=args.device, rounds=args.rounds, timeout=args.timeout)
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        print(result)
    if result.exit_code == 2:
        print(f"loadlens: UNRESOLVED: {result.why}", file=sys.stderr)
    return result.exit_code


def _fixes(args: argparse.Namespace) -> int:
    from .fixes import FIXES, survey
    from .variant import resolve

    variant = resolve(args.variant)
    sites = survey(variant.root)
    for fix in FIXES.values():
        print(f"{fix.name}  {fix.title}" + (f"\n  {fix.url}" if fix.url else ""))
        for site in sites:
            if site.fix == fix.name:
                place = f"{site.file}:{site.line}" if site.line else site.file
                print(f"  {site.state:<15} {place:<52} {site.where}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from .variant import resolve

    base = args.variant or resolve(None).release
    print(resolve(f"{base}{'-' if args.revert else '+'}{args.fix}").diff(), end="")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    good = True
    for name, fine, said in examine():
        good &= fine
        print(f"{'ok  ' if fine else 'FAIL'}  {name:<22} {said}", flush=True)
    return 0 if good else 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except CannotRun as e:
        print(f"loadlens: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("loadlens: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `loadlens … | head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
