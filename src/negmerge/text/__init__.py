"""Text to be forgotten and kept: documents, records of questions and answers, their tokens.

`persons` invents persons and facts about them, so that a demonstration needs no data.
"""
