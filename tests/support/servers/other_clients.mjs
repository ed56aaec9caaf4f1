// Asks a server with Vercel's AI SDK and with the `ollama` package; prints what came as JSON.
// node other_clients.mjs PACKAGES URL KEY MODEL
import { createRequire } from "node:module";

const [packages, url, key, model] = process.argv.slice(2);
const load = createRequire(`${packages}/`);
const { generateText, streamText, Output, jsonSchema, tool } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { Ollama } = load("ollama");
const prompt = "It is a truth universally";
const city = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Bern", "Uri"] } },
  required: ["city"],
  additionalProperties: false,
});
const told = {};

const provider = createOpenAICompatible({
  name: "shardnet",
  baseURL: `${url}/v1`,
  apiKey: key,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(model), prompt, temperature: 0, maxRetries: 0 };
told.text = (await generateText({ ...asked, maxOutputTokens: 6 })).text;
told.streamed = "";
for await (const piece of streamText({ ...asked, maxOutputTokens: 6 }).textStream) told.streamed += piece;
told.object = (await generateText({ ...asked, output: Output.object({ schema: city }) })).output;
const tools = { weather: tool({ description: "The weather", inputSchema: city }) };
const called = await generateText({ ...asked, tools, toolChoice: { type: "tool", toolName: "weather" } });
told.calls = called.toolCalls.map(({ toolName, input }) => ({ toolName, input }));

const headers = { Authorization: `Bearer ${key}` };
const ollama = new Ollama({ host: url, headers });
told.models = (await ollama.list()).models.map((one) => one.name);
const chat = {
  model,
  messages: [{ role: "user", content: prompt }],
  options: { temperature: 0, num_predict: 6 },
};
told.ollama = (await ollama.chat(chat)).message.content;
told.ollamaStreamed = "";
for await (const part of await ollama.chat({ ...chat, stream: true })) told.ollamaStreamed += part.message.content;
try {
  await ollama.chat({ ...chat, messages: [{ role: "user", content: "a b ".repeat(4000) }] });
} catch (error) {
  told.error = { name: error.name, status: error.status_code };
}
console.log(JSON.stringify(told));
