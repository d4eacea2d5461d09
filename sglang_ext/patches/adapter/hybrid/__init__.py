"""Models with windows or recurrent states: SGLang's own tree in HBM, our tiers below it."""
