"""The stand-ins that let SGLang be imported on a CPU: torchvision's operators and a module ``sgl_kernel``."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from sglang_ext.patches.cpu import kernels, runtime, short_conv
from sglang_ext.patches.cpu import torchvision as torchvision_operators


def test_torchvision_imports_beside_cpu_torch() -> None:
    import torchvision  # noqa: F401

    assert torchvision_operators.applied()


def test_operators_are_defined_once() -> None:
    """Defining a schema twice raises; a child process may prepare itself twice."""
    torchvision_operators.apply()
    torchvision_operators.apply()
    assert "nms" in str(torch.ops.torchvision.nms.default)


def test_a_kernel_without_a_cpu_form_names_itself_and_the_way_out() -> None:
    from sgl_kernel import some_new_kernel
    from sgl_kernel.mamba import another_one

    with pytest.raises(NotImplementedError, match=r"sgl_kernel.mamba.another_one.*dense"):
        another_one(1, 2)
    with pytest.raises(NotImplementedError, match=r"sgl_kernel.some_new_kernel.*dense"):
        some_new_kernel()


def test_backends_of_layers_with_states_import() -> None:
    """They name kernels and operators that no server calls before it serves such a layer."""
    from sglang.srt.layers.attention.linear import gdn_backend, kda_backend, short_conv_backend  # noqa: F401

    assert gdn_backend.causal_conv1d_update is short_conv.causal_conv1d_update_cpu


def test_the_stand_in_is_found_as_a_package_and_does_not_look_like_amx() -> None:
    assert importlib.util.find_spec("sgl_kernel") is not None
    assert importlib.util.find_spec("sgl_kernel.mamba") is not None
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed"), "SGLang would take its AMX paths"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sgl_kernel.flash_attn")
    with pytest.raises(AttributeError):
        _ = sys.modules["sgl_kernel.mamba"].__version__


def test_a_real_kernel_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel")
    kernels.apply()
    assert sys.modules["sgl_kernel"].REAL is True
    monkeypatch.delitem(sys.modules, "sgl_kernel")  # so that monkeypatch puts the stand-in back


def test_a_kernel_library_that_does_not_load_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The CUDA build on a host without CUDA."""
    (tmp_path / "sgl_kernel.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel")
    kernels.apply()
    with pytest.raises(NotImplementedError):
        sys.modules["sgl_kernel"].some_new_kernel()
    monkeypatch.delitem(sys.modules, "sgl_kernel")


@pytest.mark.parametrize(
    ("argv", "environment", "wanted"),
    [
        (["--device", "cpu"], {}, True),
        (["--device=cpu"], {}, True),
        (["--device", "cuda"], {"SGLANG_USE_CPU_ENGINE": "1"}, False),
        ([], {"SGLANG_USE_CPU_ENGINE": "1"}, True),
        ([], {}, not torch.accelerator.is_available()),
    ],
)
def test_the_cpu_runtime_is_for_servers_on_a_cpu(
    argv: list[str], environment: dict[str, str], wanted: bool
) -> None:
    assert runtime.wanted(argv, environment) is wanted


def test_a_host_that_sglang_serves_with_operators_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.in_use()
    assert runtime.unsupported_host("x86_64") is None
    assert "not aarch64; install a CPU build of sgl_kernel" in str(runtime.unsupported_host("aarch64"))
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    assert runtime.unsupported_host("aarch64") is None


def test_what_the_user_has_set_stays() -> None:
    environment = {"SGLANG_USE_CPU_ENGINE": "0"}
    runtime.prepare_process(environment)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "0"
    assert environment[runtime.CONVOLUTION_STATES] == "float32"
    assert runtime.active(environment)
    assert not runtime.active({})


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_cuda_build_of_torch_lends_no_nccl_to_a_cpu(
    cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its NCCL loads without a GPU, and with several ranks SGLang would take the CPU for a CUDA device."""
    from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    monkeypatch.setattr(torch.version, "cuda", cuda)
    environment: dict[str, str] = {}
    runtime.prepare_process(environment)
    assert (runtime.NCCL_LIBRARY in environment) is (cuda is not None)
    monkeypatch.setenv(runtime.NCCL_LIBRARY, environment.get(runtime.NCCL_LIBRARY, ""))
    with pytest.raises((OSError, ValueError)):
        NCCLLibrary(None)
    given = {runtime.NCCL_LIBRARY: "/my/libnccl.so"}
    runtime.prepare_process(given)
    assert given[runtime.NCCL_LIBRARY] == "/my/libnccl.so"
