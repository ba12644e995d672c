"""The two pages, `step` and `loop`, and what they call: updates, warm start, gate, calibration.

The folder is not called `train`, because `jaxfp8rl.train` is the public function.
"""
