// Code to copy: how each client talks to this server. Pure: {base, model, key} in, text out.

const KEY_VARIABLE = "QUARTERDECK_KEY";

const shellKey = (key) => (key ? `'${key}'` : `$${KEY_VARIABLE}`);
const shellHeader = (key) => (key ? `'Authorization: Bearer ${key}'` : `"Authorization: Bearer $${KEY_VARIABLE}"`);
const pythonKey = (key) => (key ? `"${key}"` : `os.environ["${KEY_VARIABLE}"]`);
const pythonImport = (key) => (key ? "" : "import os\n\n");

function openai({ base, model, key }) {
  return [
    { title: "Python, streamed", text: `${pythonImport(key)}from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=${pythonKey(key)})

stream = client.chat.completions.create(
    model="${model}",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=64,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)` },
    { title: "Any program that reads these variables", text: `export OPENAI_BASE_URL='${base}/v1'
export OPENAI_API_KEY=${shellKey(key)}` },
  ];
}

function curl({ base, model, key }) {
  return [
    { title: "Chat, streamed", text: `curl -N ${base}/v1/chat/completions \\
  -H ${shellHeader(key)} \\
  -H 'Content-Type: application/json' \\
  -d '{
    "model": "${model}",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 64,
    "stream": true
  }'` },
    { title: "Which models", text: `curl ${base}/v1/models -H ${shellHeader(key)}` },
  ];
}

function native({ base, key }) {
  return [
    { title: "One prompt", text: `curl ${base}/generate \\
  -H ${shellHeader(key)} \\
  -H 'Content-Type: application/json' \\
  -d '{
    "text": "The capital of France is",
    "sampling_params": {"temperature": 0, "max_new_tokens": 16},
    "return_logprob": true
  }'` },
    { title: "Which weights answered", text: `curl ${base}/get_weight_version -H ${shellHeader(key)}` },
  ];
}

function control({ base, key }) {
  return [
    { title: "State of workers and ranks", text: `curl ${base}/api/fleet -H ${shellHeader(key)}` },
    { title: "Abort one request (scope control, or its own)", text: `curl -X POST ${base}/abort_request \\
  -H ${shellHeader(key)} \\
  -H 'Content-Type: application/json' \\
  -d '{"rid": "RID"}'` },
    { title: "Health, open to all", text: `curl -i ${base}/health_generate` },
  ];
}

export const CLIENTS = { openai, curl, native, control };
