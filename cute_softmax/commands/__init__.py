"""The commands of `python -m cute_softmax`."""
