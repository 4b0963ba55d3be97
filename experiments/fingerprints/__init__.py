"""Does a change of the code change what training computes?"""
