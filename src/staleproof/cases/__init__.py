"""How a question is asked, and how its answer is kept."""
