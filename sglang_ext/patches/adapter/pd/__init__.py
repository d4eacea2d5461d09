"""Between SGLang's prefill-decode disaggregation and `engine/pd`: the transfer backend `global`."""
