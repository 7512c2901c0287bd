"""Twenty prompts of our own, for tests and small measurements; none is from a benchmark."""

PROMPTS = [
    "Explain in three sentences why the sky looks blue at noon and red at dusk.",
    "Write a Python function that merges two sorted lists without using sort.",
    "A baker sells 14 loaves an hour for 6 hours and throws 5 away. How many were sold?",
    "Translate into French: The meeting has been moved to Thursday afternoon.",
    "List five things to check before signing a flat's rental contract.",
    "Rewrite politely: Send me the report now, you are late again.",
    "What is the difference between a process and a thread? Give one example of each.",
    "Summarise: Bees visit flowers for nectar. While they drink, pollen sticks to their hair, and "
    "they carry it to the next flower, which can then make seeds. Without bees many plants would "
    "bear no fruit.",
    "Write a short poem about a lighthouse keeper who is afraid of the sea.",
    "Give me a JSON object with the fields name, age and city for a made-up person.",
    "How do I undo the last commit in git without losing my changes?",
    "Write an SQL query that returns the ten customers with the highest total of orders.",
    "Name the planets of the solar system in order of their distance from the sun.",
    "What should I cook tonight with eggs, spinach, rice and one lemon?",
    "Correct the grammar: He don't knows where is the keys of the car.",
    "Explain recursion to a child of ten with an example from daily life.",
    "Write a regular expression that matches a date such as 2026-11-15 and explain it.",
    "Give three arguments for and three against working from home.",
    "Continue the story: The letter had been lying under the door for eleven years when",
    "Convert this to a Markdown table: apples 3 euros, pears 4 euros, plums 2 euros.",
]
