"""Everything of SGLang that the patches use, found in our source and compared with SGLang's, without
importing either."""
