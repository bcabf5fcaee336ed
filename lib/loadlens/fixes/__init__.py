"""Each fix as a change of vLLM's source that can be applied and taken back.

    >>> for site in survey(resolve("0.25.1").root): print(site)
    pr46168  absent          model_executor/models/deepseek_mtp.py:313  DeepSeekMTP.load_weights
    pr46168  present         model_executor/models/deepseek_v2.py:1516  DeepseekV2Model.load_weights
    pr46168  not applicable  models/glm5next/common/model.py  no such file in this release

One module for each story: `pending` (vllm#46168) and `bias` (vllm#41424, vllm#49586, vllm#49805 and our late-bias).
`base` says what a fix is and how to add one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from .base import ABSENT, NOT_APPLICABLE, PRESENT, Edit, Fix, FixSite, Found, Site, read_source
from .bias import LateBias, Pr41424, Pr49586, Pr49805
from .pending import Pr46168

__all__ = ["ABSENT", "FIXES", "NOT_APPLICABLE", "PRESENT", "Edit", "Fix", "FixSite", "Found", "LateBias", "Pr41424",
           "Pr46168", "Pr49586", "Pr49805", "Site", "diff", "read_source", "survey"]

FIXES: dict[str, Fix] = {fix.name: fix for fix in (Pr46168(), Pr41424(), Pr49586(), Pr49805(), LateBias())}


def survey(root: Path) -> list[FixSite]:
    """Say of every fix where it is present, absent or not applicable in the vLLM under `root`.

    `root` is the folder that contains `vllm/`. By fix, then file, then line.
    """
    return [site for fix in FIXES.values() for site in _survey_one(fix, Path(root) / "vllm")]


def _survey_one(fix: Fix, package: Path) -> Iterator[FixSite]:
    concerned = fix.files(package.parent)
    for file in sorted({*concerned, *fix.known}):
        if file in concerned:
            for site in fix.sites(read_source(package / file)):
                yield FixSite(fix.name, file, site.line, site.state, site.where)
        else:
            reason = "nothing in it to change" if (package / file).is_file() else "no such file in this release"
            yield FixSite(fix.name, file, None, NOT_APPLICABLE, reason)


def diff(old: str, new: str, file: str) -> str:
    """Return the unified diff between two texts of one file ("" when they are the same).

    `file` is relative to the vllm package; the headers say a/vllm/… and b/vllm/…, so `patch -p1` understands it.
    """
    lines = difflib.unified_diff(re.findall(r".*\n|.+$", old), re.findall(r".*\n|.+$", new),
                                 f"a/vllm/{file}", f"b/vllm/{file}")
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)
