"""One model, running: stage, executor, scheduler, pipeline, engine."""
