"""What the prefill and the decode worker process have in common: assembly, the bridge to the engine thread, serving."""
