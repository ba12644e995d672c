"""A training server that speaks the wire protocol of the `tinker` client: `jaxfp8rl serve-training`.

    app       the routes: bytes to requests, errors to the shape that the client understands
    guard     the token, and the largest body
    service   sessions, models, their order of requests, and futures
    trainer   one model: forward, forward_backward, optim_step, save, load
    sampler   completions and log-probabilities of saved weights
    wire      the client's protocol buffers
"""
