"""How jobs are shown to people, wherever they run: the same columns, the same description, the same words.

==================  ==================================================================================
module              question
==================  ==================================================================================
``shown``           what is known of a job, typed?
``words``           how are durations and states said to people?
``quantities``      how are short times, memory and shares said?
``columns``         how are tables of plain text laid out?
``wanted_logs``     which logs are asked for?

``elasticjob top``
``asking``          which agents are asked for their metrics, and what if one does not answer?
``agent_page``      how is what one of them tells read?
``figures``         what do their pages say of the job?
``trend``           what has changed since the last reading?
``top_lines``       how is one job shown?
``top_table``       how are all shown?

``elasticjob report``
``report_facts``    what is to be said of a job's run?
``report_page``     how is the page laid out?
``report_charts``   how are its pictures drawn?
``report_style``    what does it look like, on a screen and on paper?
``markup``          how does no text of anybody's become markup?
==================  ==================================================================================
"""
