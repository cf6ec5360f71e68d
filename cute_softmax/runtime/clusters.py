"""How many clusters run at once on a GPU: its driver knows which SMs share a GPC."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from importlib import import_module

CTAS = 8  # of a cluster: as many as every GPU that has clusters can run
# A kernel of nothing, whose CTAs get all of an SM by asking for its shared memory.
PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\n\0"


@cache
def clusters_at_once(index: int, shared_memory: int) -> int | None:
    """Clusters of 8 CTAs that CUDA device `index` runs at once, where a CTA has so many bytes of shared memory; None
    where its driver does not say."""
    try:
        driver = import_module("cuda.bindings.driver")  # which a hub's environment may lack
        with ExitStack() as undone:
            device = asked(driver.cuDeviceGet(index))
            context = asked(driver.cuDevicePrimaryCtxRetain(device))
            undone.callback(driver.cuDevicePrimaryCtxRelease, device)
            asked(driver.cuCtxPushCurrent(context))
            undone.callback(driver.cuCtxPopCurrent)
            module = asked(driver.cuModuleLoadData(PROBE))
            undone.callback(driver.cuModuleUnload, module)
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
    except (ImportError, OSError, AttributeError, RuntimeError):
        return None


def asked(answer: tuple) -> object:
    """What the driver answers. Raises OSError where it is an error."""
    error, *found = answer
    if error.value:
        raise OSError(str(error))
    return found[0] if found else None
