"""How many clusters run at once on a GPU: its driver knows which SMs share a GPC."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

CTAS = 8  # of a cluster: as many as every GPU that has clusters can run
# A kernel of nothing, whose CTAs get all of an SM by asking for its shared memory.
PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\n\0"


def clusters_at_once(index: int, shared_memory: int) -> int | None:
    """Clusters of 8 CTAs that CUDA device `index` runs at once, where a CTA has so many bytes of shared memory; None
    where its driver does not say."""
    try:
        driver = import_module("cuda.bindings.driver")  # which a hub's environment may lack
        device = asked(driver.cuDeviceGet(index))
        context = asked(driver.cuDevicePrimaryCtxRetain(device))
    except (ImportError, OSError, RuntimeError):
        return None
    try:
        asked(driver.cuCtxPushCurrent(context))
        try:
            return _in_context(driver, shared_memory)
        finally:
            driver.cuCtxPopCurrent()
    except (OSError, AttributeError, RuntimeError):
        return None
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


def asked(answer: tuple) -> object:
    """What the driver answers. Raises OSError where it is an error."""
    error, *found = answer
    if error.value:
        raise OSError(str(error))
    return found[0] if found else None


def _in_context(driver: ModuleType, shared_memory: int) -> int:
    module = asked(driver.cuModuleLoadData(PROBE))
    try:
        probe = asked(driver.cuModuleGetFunction(module, b"probe"))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        asked(driver.cuFuncSetAttribute(probe, most, shared_memory))
        shape = driver.CUlaunchAttribute()
        shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = CTAS, 1, 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = 64 * CTAS, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = 256, 1, 1
        launch.sharedMemBytes, launch.numAttrs, launch.attrs = shared_memory, 1, [shape]
        return asked(driver.cuOccupancyMaxActiveClusters(probe, launch))
    finally:
        driver.cuModuleUnload(module)
