"""Several models on one machine: a front that loads and unloads the engine of each as requests need it.

`residency` decides which models are in memory, `catalog` knows which models there are, `engine_process` runs the engine
of one, and `model_router` is the router that ties them together.
"""
