"""vLLM as the engine: started from our codes, given new ones in place, and asked what it really multiplies."""
