"""Distribution strategies that Keras accepts in `with strategy.scope():`."""
