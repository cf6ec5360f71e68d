"""The commands of `cute-softmax`. `line` says what there is; each is loaded when it runs."""
