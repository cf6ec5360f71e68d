"""How many clusters run at once on a GPU: its driver knows which SMs share a GPC."""

from __future__ import annotations

import torch

CTAS = 8  # of a cluster: as many as every GPU that has clusters can run
# A kernel of nothing, whose CTAs get all of an SM by asking for its shared memory.
PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\n\0"


def clusters_at_once(index: int, shared_memory: int) -> int | None:
    """Clusters of 8 CTAs that CUDA device `index` runs at once, where a CTA has so many bytes of shared memory; None
    where its driver does not say."""
    try:
        with torch.cuda.device(index):
            return _asked(shared_memory)
    except (ImportError, OSError, AttributeError, RuntimeError, AssertionError):
        return None


def _asked(shared_memory: int) -> int:
    from cuda.bindings import driver

    def asked(answer: tuple):
        error, *found = answer
        if error != driver.CUresult.CUDA_SUCCESS:
            raise OSError(str(error))
        return found[0] if found else None

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
