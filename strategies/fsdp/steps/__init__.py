"""What holds while training steps run, whichever the engine: calls, hooks, gradients between two steps."""
