"""Values between sandboxed code and workers: plain data as tagged JSON text.

The format. A value is one JSON text in UTF-8 without blanks outside of strings. ``null``, ``true``,
``false``, numbers, strings and arrays are None, bool, int or float, str and list; a number with a
point or an exponent is a float, any other one an int. An object is a dict whose keys are texts, none
of which begins with ``$``. Everything else is an object of exactly one key, its tag:

    {"$tuple":[…]}  {"$set":[…]}  {"$frozenset":[…]}      the items
    {"$dict":[key,value,…]}                               a dict with other keys, or with ``$`` keys
    {"$ordered":[key,value,…]}                            OrderedDict; a worker makes a dict of it
    {"$bytes":"…"}  {"$bytearray":"…"}                    base64 with padding
    {"$float":"nan"}                                      also ``inf`` and ``-inf``
    {"$complex":[real,imaginary]}                         two floats
    {"$date":"2024-02-29"}
    {"$datetime":"2024-02-29T09:30:00.000001"}            naive, fold 0; the fraction is optional
    {"$datetime":["2024-02-29T09:30:00",fold,zone]}       fold 0 or 1; zone null or one of the next two
    {"$timezone":[microseconds]}  {"$timezone":[microseconds,name]}   a fixed offset
    {"$zone":"Asia/Tokyo"}                                ZoneInfo
    {"$time":"09:30:00"}  {"$time":["09:30:00",fold,zone]}
    {"$timedelta":[days,seconds,microseconds]}            as ``timedelta`` normalises them
    {"$decimal":"-1.50"}  {"$fraction":[numerator,denominator]}
    {"$uuid":"32 hexadecimal digits"}
    {"$path":"/app/shared/x"}  {"$purepath":"a/b"}        a worker makes a str of it
    {"$pickle":[reason,"base64"]}                         results only, see below

Arguments are ``[[positional,…],{name:value,…}]``. A value that is referred to twice is written twice.

Trust. Text from a sandbox is read by ``codec.parser``: it checks steps, bytes, depth and time
while it runs, refuses what is not of this form (an unknown tag, a wrong payload, a key twice, blanks,
a fraction that is not in lowest terms) and can build the types above and nothing else. ``$pickle`` is how a
worker returns an instance of a class that has no tag: the whole value is an ordinary pickle, which
only the sandbox opens; ``reason`` names the class for people. The host refuses it.

    tagged.py        writes the text; standard library only, because the sandbox's runner contains it
    parser.py        reads it within a budget; budget.py and constructors.py hold limits and types
    short_texts.py   reads most short texts as the parser would, by C code; leaves the others to it
    values.py        arguments and results
    returned_*.py    what may leave a worker, and in which form
    decode_pool.py   reads large arguments on a thread, in turns between chats
"""
