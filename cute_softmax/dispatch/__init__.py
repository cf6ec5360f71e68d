"""From a checked call to a launch: what torch's state asks for, autograd, operators, and forms of repeated calls."""
