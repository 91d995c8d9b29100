"""Text around token ids: tokenizer, incremental detokenization, stop strings, chat templates, grammars."""
