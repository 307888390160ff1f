"""Which decoders lz knows by their code, and what each is made of."""
