"""Step time and KV capacity of a model on a device, from data sheets and measured kernels."""
