"""How far the cost model's predictions are from real servers."""
