"""Ollama's endpoints."""
