"""The two pages, `step` and `loop`, and the modules they call: start, context, warm start, gate, updates,
publishing, evaluation, resume.

The folder is not called `train`, because `jaxfp8rl.train` is the public function.
"""
