"""What the patches need of SGLang, found in our source and held to SGLang's, without importing either."""
