"""The two pages, `step` and `loop`, and the modules they call: context, updates, warm start, gate, resume.

The folder is not called `train`, because `jaxfp8rl.train` is the public function.
"""
