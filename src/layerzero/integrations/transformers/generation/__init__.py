"""generate() of an accelerated model: the loop over tokens, the draw, speculation."""
