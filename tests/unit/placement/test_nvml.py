"""The NVML inventory against a stand-in module with the answers of a driver; no GPU is needed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from placement.errors import InventoryError
from placement.inventory.nvml import select_visible, visible_gpus
from placement.types import Gpu

HOST_MEMORY = 64 * 2**30


class DriverAnswers(ModuleType):
    """The part of pynvml's surface that the inventory uses, answering from a list of devices."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_FunctionNotFound(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    def __init__(self, devices: list[dict], init_error: type[Exception] | None = None):
        super().__init__("pynvml")
        self.devices = devices
        self.init_error = init_error
        self.open_sessions = 0

    def nvmlInit(self):
        if self.init_error is not None:
            raise self.init_error("init")
        self.open_sessions += 1

    def nvmlShutdown(self):
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def _answer(self, handle, key):
        answer = self.devices[handle][key]
        if isinstance(answer, type) and issubclass(answer, Exception):
            raise answer(key)
        return answer

    def nvmlDeviceGetUUID(self, handle):
        return self._answer(handle, "uuid")

    def nvmlDeviceGetName(self, handle):
        return self._answer(handle, "name")

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._answer(handle, "memory")

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self._answer(handle, "capability")

    def nvmlDeviceGetNumGpuCores(self, handle):
        return self._answer(handle, "cores")


def a100(index: int) -> dict:
    return {
        "uuid": f"GPU-{index}",
        "name": "NVIDIA A100-SXM4-40GB",
        "memory": SimpleNamespace(total=40 * 2**30, free=39 * 2**30),
        "capability": (8, 0),
        "cores": 6912,
    }


@pytest.fixture(autouse=True)
def _no_visible_devices_setting(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus_from(monkeypatch, module) -> tuple[Gpu, ...]:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return visible_gpus(host_memory_bytes=HOST_MEMORY)


def test_no_library_means_no_gpus(monkeypatch):
    assert gpus_from(monkeypatch, None) == ()  # None in sys.modules makes the import fail


@pytest.mark.parametrize(
    "error", [DriverAnswers.NVMLError_LibraryNotFound, DriverAnswers.NVMLError_DriverNotLoaded]
)
def test_no_driver_means_no_gpus(monkeypatch, error):
    assert gpus_from(monkeypatch, DriverAnswers([], init_error=error)) == ()


def test_a_driver_that_fails_is_an_error_with_a_way_out(monkeypatch):
    with pytest.raises(InventoryError, match=r"the driver did not start.*CUDA_VISIBLE_DEVICES="):
        gpus_from(monkeypatch, DriverAnswers([], init_error=DriverAnswers.NVMLError))


def test_two_gpus_are_read_and_nvml_is_closed(monkeypatch):
    driver = DriverAnswers([a100(0), a100(1)])
    gpus = gpus_from(monkeypatch, driver)
    assert [gpu.uuid for gpu in gpus] == ["GPU-0", "GPU-1"]
    # 6912 cores / 64 per multiprocessor (8.0) = 108
    assert gpus[0].sm_count == 108
    assert gpus[0].memory_total_bytes == 40 * 2**30
    assert gpus[0].memory_free_bytes == 39 * 2**30
    assert gpus[0].compute_capability == (8, 0)
    assert driver.open_sessions == 0


def test_names_in_bytes_become_text(monkeypatch):
    gpus = gpus_from(monkeypatch, DriverAnswers([a100(0) | {"uuid": b"GPU-0", "name": b"NVIDIA A100"}]))
    assert (gpus[0].uuid, gpus[0].name) == ("GPU-0", "NVIDIA A100")


def test_a_query_that_is_not_supported_leaves_that_value_out(monkeypatch):
    gpus = gpus_from(monkeypatch, DriverAnswers([a100(0) | {"cores": DriverAnswers.NVMLError_NotSupported}]))
    assert gpus[0].sm_count is None
    assert gpus[0].compute_capability == (8, 0)


def test_a_gpu_without_memory_of_its_own_has_the_hosts(monkeypatch):
    gpus = gpus_from(monkeypatch, DriverAnswers([a100(0) | {"memory": DriverAnswers.NVMLError_NotSupported}]))
    assert gpus[0].memory_total_bytes == HOST_MEMORY
    assert gpus[0].memory_free_bytes is None


def test_a_lost_gpu_is_an_error_and_nvml_is_closed(monkeypatch):
    driver = DriverAnswers([a100(0), a100(1) | {"uuid": DriverAnswers.NVMLError}])
    with pytest.raises(InventoryError, match="a GPU could not be read: uuid"):
        gpus_from(monkeypatch, driver)
    assert driver.open_sessions == 0


@pytest.mark.parametrize("value", ["", "-1", " "])
def test_hidden_gpus_are_not_asked_for(monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus_from(monkeypatch, DriverAnswers([], init_error=DriverAnswers.NVMLError)) == ()


def test_the_environment_chooses_among_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in gpus_from(monkeypatch, DriverAnswers([a100(0), a100(1)]))] == [1]


FOUR = tuple(Gpu(index=i, uuid=f"GPU-{i}{i}ab", name="fake", memory_total_bytes=1) for i in range(4))


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ("0,2", [0, 2]),
        ("3, 1", [3, 1]),
        ("GPU-22", [2]),
        ("1,7,2", [1]),  # CUDA stops at the first that does not exist
        ("GPU-", []),  # ambiguous
        ("1,1,2", [1]),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(wanted, indices):
    assert [gpu.index for gpu in select_visible(FOUR, wanted)] == indices


def test_mig_instances_are_refused_by_name():
    with pytest.raises(InventoryError, match="MIG instances cannot be planned for"):
        select_visible(FOUR, "MIG-1234")
