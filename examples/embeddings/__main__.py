"""`python -m embeddings`, in examples/."""

from embeddings.commands import main

main()
