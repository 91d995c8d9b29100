"""The SGLang dialect: POST /generate and the routes around it, translated onto the pipeline of all dialects."""
