"""The engine's side of a publish, as a plugin of vLLM: people who run `vllm serve` install the wheel and add
two flags.

    vllm serve MODEL --weight-transfer-config '{"backend": "jaxfp8rl"}' \\
        --middleware bridges.vllm_plugin.guard.Guard

    versions    what is private to a version of vLLM: the class of the backend, and a method of its workers
    receiver    one rank: which rows it holds, writing them, and the digests of its live bytes
    slots       memory through which bytes come: of this host, of a GPU, or from another host by NCCL
    guard       the token before all routes, the lease, and which step of a publish may follow which

It imports neither jax nor the learner: an engine's environment needs vLLM alone.
"""


def register() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in each of its processes.

    Raises BridgeError if this process was asked for the backend, and its vLLM is not one that the plugin
    knows.
    """
    from bridges.vllm_plugin.versions import install

    install()
