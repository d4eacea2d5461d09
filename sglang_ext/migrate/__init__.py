"""From the command lines of HiCache, LMCache and SGLang's router to this package's."""
