"""How jobs are shown to people, wherever they run: the same columns, the same description, the same words.

==================  ==================================================================================
module              question
==================  ==================================================================================
``shown``           what is known of a job, typed?
``words``           how are durations and states said to people?
``columns``         how are tables of plain text laid out?
``wanted_logs``     which logs are asked for?
==================  ==================================================================================
"""
