"""The doctor on this very machine, and its findings on machines that are not well."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from jaxfp8rl.cli import doctor, main
from jaxfp8rl.cli.doctor import Check
from jaxfp8rl.gpus import Gpu

OURS = {"jaxfp8rl": ["jax<0.13,>=0.11.2", 'jax[cuda13]<0.13,>=0.11.2; extra == "cuda13"',
                     'vllm<0.33,>=0.25.1; extra == "vllm"']}


def finish(stdout="", stderr="", returncode=0):
    return lambda *a, **k: types.SimpleNamespace(stdout=stdout, stderr=stderr, returncode=returncode)


def only(monkeypatch, *groups):
    for name in ("_python", "_gpu", "_extra", "_jax", "_cuda", "_packages", "_versions", "_bridge", "_memory",
                 "_disk", "_configs"):
        if name not in groups:
            monkeypatch.setattr(doctor, name, lambda: iter(()))


@pytest.fixture(scope="module")
def here():
    """`jaxfp8rl doctor --json` as a user runs it."""
    done = subprocess.run([sys.executable, "-m", "jaxfp8rl", "doctor", "--json"], capture_output=True,
                          text=True)
    return done, {c["name"]: c for c in json.loads(done.stdout)}


def test_this_machine_is_fit(here):
    done, checks = here
    assert done.returncode == 0, done.stderr
    assert {"python", "gpu", "extra", "jax", "packages", "versions", "tasks", "torch", "memory", "disk",
            "configs"} <= checks.keys()
    assert all(c["fix"] for c in checks.values() if c["status"] == "FAIL")
    assert "all valid" in checks["configs"]["detail"] and "demo" in checks["configs"]["detail"]


def test_dlpack_is_tried_on_this_machine(here):
    _, checks = here
    if checks["torch"]["status"] == "-":
        pytest.skip("torch is not installed")
    assert "float8_e4m3fn zero copy" in checks["dlpack"]["detail"]


@pytest.mark.parametrize(
    "done, status, says",
    [
        (finish('{"torch": null, "vllm": null, "dlpack": {}, "vllm_fp8": null}'), "-", "not installed"),
        (finish(stderr="Traceback\nImportError: libcudart.so", returncode=1), "FAIL",
         "fails when used: ImportError: libcud"),
        (finish(returncode=-11), "FAIL", "exit status -11"),
    ],
)
def test_torch_absent_or_broken(done, status, says, monkeypatch):
    monkeypatch.setattr(doctor.subprocess, "run", done)
    (check,) = doctor._bridge()
    assert check.status == status and says in check.detail and check.fix


def test_dlpack_that_carries_wrong_values_fails(monkeypatch):
    dlpack = {"float32": "zero copy", "float8_e4m3fn": "wrong values"}
    found = {"torch": "2.0", "vllm": "0.25.1", "dlpack": dlpack, "vllm_fp8": None}
    monkeypatch.setattr(doctor.subprocess, "run", finish(json.dumps(found)))
    checks = {c.name: c for c in doctor._bridge()}
    assert checks["dlpack"].status == "FAIL" and "float8_e4m3fn wrong values" in checks["dlpack"].detail
    assert str(checks["vllm"]).startswith("ok   vllm       0.25.1, BF16 and FP8")


def test_gpu_that_jax_does_not_see_fails(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(doctor.subprocess, "run", finish("NVIDIA H200, 9.0, 580.159, 143771 MiB\n"))
    (gpu,), (jax,) = doctor._gpu(), doctor._jax()
    assert gpu.status == "ok" and gpu.detail.startswith("NVIDIA H200, compute capability 9.0, driver 580.159")
    assert jax.status == "FAIL" and "cuda13" in jax.fix


@pytest.mark.parametrize("visible, plugin, says", [
    ("", None, "unset CUDA_VISIBLE_DEVICES"), ("-1", "0.11.2", "unset CUDA_VISIBLE_DEVICES"),
    ("0", "0.11.2", "says why JAX's CUDA plug-in does not start"), ("0", None, '"jaxfp8rl[cuda13]"')])
def test_the_fix_for_a_gpu_that_jax_does_not_see_suits_the_cause(monkeypatch, visible, plugin, says):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(doctor, "_version", lambda name: plugin)
    assert says in doctor._why_unused()


def test_a_container_without_nvidia_smi_has_gpus_all_the_same(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor, "_by_driver", lambda: [Gpu("0", 79 * 2**30)])
    (gpu,) = doctor._gpu()
    assert gpu.status == "-" and gpu.detail.startswith("GPUs of 79 GiB; nvidia-smi is not here")
    monkeypatch.setattr(doctor.subprocess, "run", _missing)
    assert list(doctor._extra()) == [] and doctor._driver() == 0


def _missing(*_, **__):
    raise FileNotFoundError(2, "No such file", "nvidia-smi")


def test_missing_package_is_named(monkeypatch):
    have = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p in ("optax", "math-verify") else have(p))
    packages, tasks = doctor._packages()
    assert (packages.status, packages.detail) == ("FAIL", "missing: optax")
    assert tasks.status == "-" and "math-verify" in tasks.detail


@pytest.fixture
def machine(monkeypatch):
    """machine(versions, driver, torch_cuda, requires): an NVIDIA machine with these packages and JAX 0.11.2
    beside those that are here."""

    def make(driver="580.159", torch_cuda="13.0", requires=None, nvcc=None, **versions):
        have, asked = doctor._version, doctor._requires
        versions = {"jax": "0.11.2", "jaxlib": "0.11.2"} | {name.replace("_", "-"): version
                                                            for name, version in versions.items()}
        monkeypatch.setattr(doctor, "_version", lambda p: versions[p] if p in versions else have(p))
        monkeypatch.setattr(doctor, "_requires", lambda p: (requires or {}).get(p, asked(p)))
        monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
        monkeypatch.setattr("jaxfp8rl.rollout.engines.cuda_compiler", lambda: nvcc)
        probe = {"torch": versions.get("torch", "2.11.0+cu130"), "vllm": versions.get("vllm", "0.25.1"),
                 "torch_cuda": torch_cuda,
                 "dlpack": {"float32": "zero copy"}, "vllm_fp8": None}

        def run(command, **_):
            return finish(f"{driver}\n" if command[0] == "nvidia-smi" else json.dumps(probe))()

        monkeypatch.setattr(doctor.subprocess, "run", run)

    return make


@pytest.mark.parametrize(
    "group, found, status, says, fix",
    [
        ("_cuda", {}, None, "", ""),
        ("_cuda", {"jax_cuda13_plugin": "0.11.2"}, "ok", "plug-in for CUDA 13 is 0.11.2", ""),
        ("_cuda", {"jax_cuda13_plugin": "0.11.0"}, "FAIL",
         "0.11.0, jaxlib is 0.11.2: the versions must be equal",
         '"jax[cuda13]==0.11.2"'),
        ("_cuda", {"jax_cuda13_plugin": "0.11.2", "driver": "550.54"}, "FAIL", "the driver 550 is too old",
         '"jaxfp8rl[cuda12]"'),
        ("_cuda", {"jax_cuda12_plugin": "0.11.2", "driver": "470.1"}, "FAIL", "too old for CUDA 12",
         "a driver of 525 or newer"),
        ("_cuda", {"jax_cuda12_plugin": "0.11.2", "jax_cuda13_plugin": "0.11.2"}, "FAIL",
         "for CUDA 12 and 13", "uninstall"),
        ("_cuda", {"jax_cuda12_plugin": "0.11.2"}, "-", "CUDA 12 has never been run on a GPU",
         '"jaxfp8rl[cuda13]"'),
        ("_cuda", {"jax_cuda12_plugin": "0.11.2", "driver": "550.54"}, "-", "never been run on a GPU",
         "update of the driver"),
        ("_cuda", {"jax_cuda13_plugin": "0.11.2", "driver": "NVIDIA-SMI has failed"}, "ok",
         "plug-in for CUDA 13 is 0.11.2", ""),
        ("_extra", {}, "ok", "take cuda13, with vllm or without; cuda12 has never been run", ""),
        ("_extra", {"driver": "550.54"}, "-", "one process would load two CUDA stacks",
         "a driver of 580 or newer"),
        ("_extra", {"driver": "470.1"}, "FAIL", "470 is too old for cuda12 and cuda13", "a driver of 580"),
        ("_extra", {"driver": "NVIDIA-SMI has failed"}, None, "", ""),
        ("_nvcc", {"nvcc": None}, "-", 'needed for rollout.fp8_kernel = "deep_gemm"', "CUDA_HOME"),
        ("_nvcc", {"nvcc": "/usr/bin/nvcc"}, "ok", "/usr/bin/nvcc", ""),
        ("_packages", {"jax": "0.10.1", "requires": OURS}, "FAIL", "jax 0.10.1 is not >=0.11.2",
         'pip install "jax<0.13,>=0.11.2"'),
        ("_packages", {"jax": "0.99", "requires": OURS}, "ok", "flax", ""),
        ("_packages", {"vllm": "0.20.0", "requires": OURS}, "FAIL", "vllm 0.20.0 is not >=0.25.1",
         'pip install "vllm<0.33,>=0.25.1"'),
        ("_packages", {"optax": None, "flax": "0.9"}, "FAIL", "missing: optax", "pip install jaxfp8rl"),
        ("_versions", {}, "ok", "as tested: jax 0.11.2", ""),
        ("_versions", {"jax": "0.12.0"}, "-", "jax 0.12.0 has not been tested (newest tested: 0.11.2)",
         'pip install "jax<0.12"'),
        ("_torch", {}, "ok", "2.11.0+cu130, CUDA 13.0", ""),
        ("_torch", {"torch_cuda": None}, "FAIL", "is a build for CPUs, but there is a GPU",
         '"jaxfp8rl[vllm]"'),
        ("_torch", {"jax_cuda12_plugin": "0.11.2"}, "-", "CUDA 12: one process loads two CUDA stacks",
         '"jaxfp8rl[cuda13]"'),
        ("_vllm", {}, "ok", "0.25.1, BF16 and FP8", ""),
        ("_vllm", {"requires": {"vllm": ["torch==2.10.0"]}}, "FAIL", "built for torch==2.10.0",
         'pip install "torch==2.10.0"'),
        ("_vllm", {"vllm": "0.40.1"}, "-", "vllm 0.40.1 has not been tested", '"vllm==0.25.1"'),
        ("_torch", {"torch": "2.14.0+cu130"}, "-", "torch 2.14.0+cu130 has not been tested",
         '"torch<2.14"'),
    ],
)
def test_broken_versions_are_found(group, found, status, says, fix, machine):
    machine(**found)
    checks = list(getattr(doctor, "_bridge" if group in ("_torch", "_vllm") else group)())
    checks = [c for c in checks if group not in ("_torch", "_vllm") or c.name == group[1:]]
    assert [c.status for c in checks[:1]] == ([status] if status else [])
    assert not status or (says in checks[0].detail and fix in checks[0].fix
                          and bool(checks[0].fix) == (status != "ok"))


def test_a_crashing_check_is_a_finding_and_the_exit_code_says_so(monkeypatch, capsys):
    def crash():
        raise OSError("no /proc")
        yield

    only(monkeypatch, "_python")
    monkeypatch.setattr(doctor, "_memory", crash)
    monkeypatch.setattr(crash, "__name__", "_memory")
    assert main.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL memory     OSError: no /proc" in out and "1 of 2 checks failed: memory" in err


def test_the_fix_stands_under_its_line():
    lines = str(Check("disk", "FAIL", "1 GiB free", "free some")).splitlines()
    assert lines == ["FAIL disk       1 GiB free", "                fix: free some"]
