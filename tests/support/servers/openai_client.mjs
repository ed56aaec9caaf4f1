// Asks a server with the `openai` package and prints what came as JSON.
// node openai_client.mjs PACKAGES URL KEY MODEL
import { createRequire } from "node:module";

const [packages, baseURL, apiKey, model] = process.argv.slice(2);
const OpenAI = createRequire(`${packages}/`)("openai").default;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const chat = {
  model,
  messages: [{ role: "user", content: "It is a truth universally" }],
  max_tokens: 6,
  temperature: 0,
};
const told = {};

for await (const one of client.models.list()) (told.models ??= []).push(one.id);
const answer = await client.chat.completions.create(chat);
told.text = answer.choices[0].message.content;
told.usage = answer.usage;

const options = { stream: true, stream_options: { include_usage: true } };
told.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...chat, ...options })) {
  told.streamed += chunk.choices[0]?.delta?.content ?? "";
  told.streamedUsage = chunk.usage ?? told.streamedUsage;
}

const parameters = {
  type: "object",
  properties: { city: { enum: ["Bern", "Uri"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "weather", parameters } };
const runner = client.chat.completions.stream({
  ...chat,
  max_tokens: 100,
  tools: [weather],
  tool_choice: "required",
  parallel_tool_calls: false,
});
told.call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;

const asked = { model, input: "It is a truth universally", max_output_tokens: 6, temperature: 0 };
told.response = (await client.responses.create(asked)).output_text;
told.responseEvents = [];
const stream = client.responses.stream({
  ...asked,
  max_output_tokens: 100,
  tools: [{ type: "function", name: "weather", parameters, strict: true }],
  tool_choice: { type: "function", name: "weather" },
  parallel_tool_calls: false,
});
for await (const event of stream) told.responseEvents.push(event.type);
told.responseOutput = (await stream.finalResponse()).output;

try {
  const messages = [{ role: "user", content: "a b ".repeat(4000) }];
  await client.chat.completions.create({ ...chat, messages, stream: true });
} catch (error) {
  told.error = { status: error.status, type: error.type, isBadRequest: error instanceof OpenAI.BadRequestError };
}
console.log(JSON.stringify(told));
