"""From a Plan to the GPU: compile, keep on disk, launch."""
