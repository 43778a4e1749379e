"""Text generation: the scheduler plans a step, the engine runs it."""
