"""Benchmarks of cute_softmax against torch, torch.compile, Liger, QuACK and cuDNN: `python -m benchmarks`."""
