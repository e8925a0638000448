"""Build the mock for the CUDA build of PyTorch that runs this script: OUT/mock.so and OUT/libcuda.so.1.

    VENV/bin/python benchmarks/gpu/mock/build.py OUT

Every function of CUDA's libraries that PyTorch or Triton refers to and no source here defines gets a stub that returns
0, success. Needs g++ and binutils; the headers are those of the packages that torch installs, and of Triton.
"""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
MOCK = ("memory.cpp", "runtime.cpp", "libraries.cpp", "nccl.cpp")

LIBRARIES = re.compile("(_?_?cuda|cublas|nccl|cusparse|cusolver|cudnn|cufft|curand|cupti|nvtx|cuFile)")
DRIVER = re.compile("cu[A-Z]")
# Names that PyTorch and Triton look up while they run stand in their files as strings.
LOOKED_UP = re.compile(
    "cu(Ctx|Dev|Device|Driver|Event|Func|Get|Green|Init|Launch|Library|Link|Mem|Memcpy|Memset|Module|Multicast|"
    "Occupancy|Pointer|Stream|Tensor)[A-Za-z0-9]*(_v[0-9])?"
)


def output(*command: str | Path) -> list[str]:
    """The lines that a command prints; nm has a complaint and exit code 1 for files without symbols."""
    result = subprocess.run([str(each) for each in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return result.stdout.decode(errors="replace").splitlines()


def symbols(path: Path, which: str) -> Iterator[str]:
    """The dynamic symbols of a library without their versions; `which`: defined or undefined."""
    for line in output("nm", "-D", f"--{which}-only", path):
        if words := line.split():
            yield words[-1].partition("@")[0]


def compile_library(sources: Iterable[Path], result: Path, *libraries: str) -> None:
    """Compile sources into a shared library."""
    # Triton has headers of the compiler that no package of torch's has; the packages' own come first.
    folders = [*sorted((SITE / "nvidia").glob("*/include")), SITE / "triton/backends/nvidia/include"]
    flags = ["-O1", "-fPIC", "-shared", "-std=c++17", *(f"-I{folder}" for folder in folders)]
    command = ["g++", *flags, *map(str, sources), "-o", str(result), *libraries]
    subprocess.run(command, check=True)


def stubs(names: Iterable[str], path: Path) -> Path:
    """Write a function that returns 0 for each name."""
    lines = [f"long {name}() {{ return 0; }}" for name in sorted(names)]
    path.write_text("\n".join(["// Written by build.py.", 'extern "C" {', *lines, "}", ""]))
    return path


def main() -> None:
    """Build both libraries; each is compiled once to learn what it defines, and then with the stubs of the rest."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch_libraries = [*(SITE / "torch/lib").glob("*.so*")]
    needed = {name for path in torch_libraries for name in symbols(path, "undefined")}

    sources, library = [HERE / name for name in MOCK], out / "mock.so"
    compile_library(sources, library)
    missing = {name for name in needed if LIBRARIES.match(name)} - {*symbols(library, "defined")}
    compile_library([*sources, stubs(missing, out / "library_stubs.cpp")], library)

    driver, library = HERE / "driver.cpp", out / "libcuda.so.1"
    compile_library([driver], library, "-ldl")
    files = [*torch_libraries, *(SITE / "triton").rglob("*.so*"), *(SITE / "triton").rglob("driver.c")]
    named = {line for path in files for line in output("strings", path) for line in re.findall(r"\w+", line)}
    wanted = {name for name in needed if DRIVER.match(name)} | {name for name in named if LOOKED_UP.fullmatch(name)}
    wanted = {name for name in wanted if not name.startswith("cuFile")} - {*symbols(library, "defined")}
    compile_library([driver, stubs(wanted, out / "driver_stubs.cpp")], library, "-ldl")
    link = out / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    print(f"{out}: {len(missing)} stubs in mock.so, {len(wanted)} in libcuda.so.1")


if __name__ == "__main__":
    main()
