"""One engine of compare_engines.py as a process of its own: requests and answers are lines of JSON.

    {"do": "ask", "prompt": [...], "tokens": n}  ->  {"ttft": s}, at once, and at the end {"tokens": [...], "cached": n}
    {"do": "stream", "prompt": [...], "tokens": n, "others": [[...], ...]}
        decodes n tokens, and meanwhile, evenly spread, asks for the first token of each of the others
                                                 ->  {"quiet": [s, ...], "beside": [[s, ...], ...], "cached": [n, ...]}
    {"do": "reset", "connector": bool}  forgets the engine's own cache of prefixes, and what the connector has in memory
    {"do": "end"}
"""

import itertools
import json
import os
import sys
import time


class Engine:
    def __init__(self, options, answer):
        from vllm import LLM, SamplingParams
        self.llm = LLM(skip_tokenizer_init=True, seed=0, disable_log_stats=False, **options)
        self.engine, self.sampling, self.answer = self.llm.llm_engine, SamplingParams, answer
        self.numbers = itertools.count()

    def add(self, prompt, tokens):
        name = str(next(self.numbers))
        sampling = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def step(self):
        """The requests that a step has given a token, and when."""
        outputs = self.engine.step()
        now = time.perf_counter()
        if not outputs:
            time.sleep(0.001)  # as vLLM's own process does while requests wait for what they load
        return [(o, now) for o in outputs]

    def ask(self, prompt, tokens):
        begin, first, last = time.perf_counter(), None, None
        self.add(prompt, tokens)
        while self.engine.has_unfinished_requests():
            for output, now in self.step():
                if first is None:
                    first = now
                    self.answer({"ttft": first - begin})
                last = output
        return {"tokens": list(last.outputs[0].token_ids), "cached": last.num_cached_tokens}

    def stream(self, prompt, tokens, others):
        """Times between the first request's tokens: until others come, and from each other's coming to its token."""
        stream, quiet, beside, cached = self.add(prompt, tokens), [], [], []
        coming, every = list(others), tokens // (len(others) + 1)
        last, n, other = None, 0, None
        while self.engine.has_unfinished_requests():
            for output, now in self.step():
                if output.request_id == stream:
                    if last is not None:
                        (quiet if other is None else beside[-1]).append(now - last)
                    last, n = now, n + 1
                elif output.request_id == other:
                    cached.append(output.num_cached_tokens)
                    other = None
            if coming and other is None and n >= every * (len(others) - len(coming) + 1):
                beside.append([])
                other = self.add(coming.pop(0), 1)
        return {"quiet": quiet, "beside": beside, "cached": cached}

    def reset(self, connector):
        return {"reset": self.engine.reset_prefix_cache(reset_connector=connector)}


def main():
    out = os.fdopen(os.dup(1), "w")  # for answers alone: what the engine prints goes where errors go
    os.dup2(2, 1)

    def answer(value):
        out.write(json.dumps(value) + "\n")
        out.flush()

    engine = Engine(json.loads(sys.argv[1]), answer)
    answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        if do == "end":
            break
        answer(getattr(engine, do)(**order))


if __name__ == "__main__":
    main()
