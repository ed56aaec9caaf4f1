"""Files and batches in OpenAI's form: many requests that run behind those of people."""
