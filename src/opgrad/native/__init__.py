"""A Python call becomes a native one: objects are compared, a plan is found, memory taken, kernels run."""
