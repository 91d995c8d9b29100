"""The OpenAI endpoints as vLLM extends them: schemas, and translations to and from `router.serve`."""
