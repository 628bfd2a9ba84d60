"""Load a base checkpoint and its ports as anyone would, ask them the same questions, and write their answers to JSON.

Run as a script in a process that cannot import the project: ports are loaded with the code files beside their weights.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    """Ask every model every question, compare logits on a text, and write a JSON object by checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Example: python demo/ask.py source port --questions '[\"Who?\"]' --text a.txt --output b",
    )
    parser.add_argument("source", help="the base checkpoint")
    parser.add_argument("ports", nargs="+", help="checkpoints with Attention Residuals")
    parser.add_argument("--questions", required=True, help="a JSON list of questions")
    parser.add_argument("--text", type=Path, required=True, help="a page of text to compare logits on")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)

    # Load the models.
    folders, questions = [arguments.source, *arguments.ports], json.loads(arguments.questions)
    tokenizer = AutoTokenizer.from_pretrained(arguments.source)
    models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval() for folder in folders]
    results = [{"class": type(model).__name__, "answers": []} for model in models]
    seconds = [[] for _ in models]

    # Ask: models take turns, question by question, so that none has the quieter machine.
    with tqdm(total=len(questions) * len(models), desc="asking", unit="answer") as bar:
        for question in questions:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            for index, model in enumerate(models):
                begin = time.perf_counter()
                output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)
                answer = output[0, inputs["input_ids"].shape[1] :]
                seconds[index].append((time.perf_counter() - begin) / len(answer))
                results[index]["answers"].append(tokenizer.decode(answer, skip_special_tokens=True).strip())
                bar.update()

    # Compare logits with the original's, and keep the first port's depth weights for the last question.
    text = tokenizer(arguments.text.read_text(), return_tensors="pt", truncation=True, max_length=1024)
    with torch.no_grad():
        reference = models[0](**text).logits.double()
        for index, model in enumerate(models):
            logits = model(**text).logits.double()
            results[index] |= {
                "relative_logit_error": ((logits - reference).norm() / reference.norm()).item(),
                "text_tokens": text["input_ids"].shape[1],
                "seconds_per_token": median(seconds[index]),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
        depth = models[1](**inputs, output_depth_attentions=True).depth_attentions
    results[1]["depth_weights"] = [weights[0].mean(0).tolist() for weights in depth]  # a row per site, mean over tokens
    arguments.output.write_text(json.dumps(dict(zip(folders, results, strict=True)), indent=1))


if __name__ == "__main__":
    main()
