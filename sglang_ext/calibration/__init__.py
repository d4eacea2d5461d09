"""``sglang-ext calibrate``: measuring a model on a device for the cost model."""
